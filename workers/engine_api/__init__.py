"""The engines' HTTP protocol, requests to engines, and discovery of the engines of a run."""
