"""What is good: text in, score out."""
