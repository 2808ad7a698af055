"""What the rows say: one typed table, one file per question (numbers, table, figure), claims, reports.  No torch."""
