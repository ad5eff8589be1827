"""Images and videos: decoded, processed for a model, and located among the tokens of a request."""
