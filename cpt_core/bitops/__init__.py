"""What training costs in bit operations: a plan before it runs, a ledger of what ran.  Paper: section 4.1."""
