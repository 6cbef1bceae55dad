"""Adapters on the Hub: pushed with a generated card, in one commit."""
