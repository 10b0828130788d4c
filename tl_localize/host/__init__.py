"""What knows TransformerLens: which class a model is, and how a Bridge is made."""
