"""INJ: rows that were trained on purpose are looked for."""
