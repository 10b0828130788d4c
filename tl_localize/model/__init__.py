"""All that touches TransformerLens: loading, parts of a forward pass, the view on neurons, hooks,
memory.
"""
