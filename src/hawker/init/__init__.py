"""The programs that are process 1 inside machines, in C, and how they are built."""
