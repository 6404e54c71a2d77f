"""What keeps the engines busy: one worker per engine, and the teacher that scores what it sampled."""
