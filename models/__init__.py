"""Models and services that stages are handed: embedders and cross-encoders."""
