//! Diagnostics: what is wrong or doubtful in a definition, in AWS's words.
