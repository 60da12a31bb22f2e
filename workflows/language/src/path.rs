//! AWS's dialect of JSONPath and reference paths, compiled once.
