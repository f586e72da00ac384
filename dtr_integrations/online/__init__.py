"""Eager PyTorch seen operator by operator. Here so far: the recorder of operator logs."""
