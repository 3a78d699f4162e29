"""A server of OpenAI's protocol whose answers are steered to a part of the chat: `lapa2 serve`."""
