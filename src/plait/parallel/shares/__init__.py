"""Shares of the batch by speed (batch_shares).

strategy  parts as given, or by measured speeds
balance   measured speeds turned into parts while training
"""
