"""What texts are steered towards, with which prefixes and prompts."""
