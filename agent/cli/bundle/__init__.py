"""``drahealth bundle``: an archive of what a bug report needs, without secrets."""
