"""Weights from elsewhere and for elsewhere: architectures of transformers as this GPT, and the other way."""
