"""Many runs: stores of rows, processes, clusters, plans of what there is to run and what it takes."""
