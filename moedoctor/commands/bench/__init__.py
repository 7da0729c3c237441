"""The measurements of `moedoctor bench`: backends, an expert cache, or engines."""
