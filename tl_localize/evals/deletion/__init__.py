"""DEL: neurons are ablated, and what is forgotten is measured."""
