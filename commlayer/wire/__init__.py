"""What travels: the codec of values and tensors, the header message and its lanes."""
