"""Groups as actors of a Ray cluster: leases are placement groups, the ledger stays outside Ray."""
