"""Labels of a teacher for images without labels (Appendix F.3; Xie et al., 2020)."""
