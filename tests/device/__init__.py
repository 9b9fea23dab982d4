"""Test doubles that keep the rules of NCCL and CUDA, and the tests that train over them."""
