"""The cluster's network plugins: what each writes for a Pod, as plan objects."""
