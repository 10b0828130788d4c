"""Results for readers: tables, figures, the token view, and what the paper published."""
