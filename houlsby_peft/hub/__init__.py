"""Push adapters to the Hub, each with a generated card, in one commit."""
