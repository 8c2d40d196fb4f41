"""From MAX's V2 graph API to ModuleV3: classify, rewrite with LibCST, prove both equal, report."""
