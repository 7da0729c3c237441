"""What `moedoctor bench` measures: backends, an expert cache, or engines."""
