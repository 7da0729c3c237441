"""Known failures, one module each: how to provoke it, how to see it, what it claims, which fix answers it."""
