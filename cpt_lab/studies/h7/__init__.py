"""H7 and H8: forward bits paid for by fewer gradient bits, and cycles at equal cost."""
