"""Storage formats: what they are (`spec`, no torch) and how tensors become bytes (`codec`, torch)."""
