"""Carry a plan out: split the joint graph as the schedule says, and compile modules in place. Imports torch;
no framework."""
