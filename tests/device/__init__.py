"""Test doubles with the rules of NCCL and CUDA, and the tests that train with them."""
