//! Actions carried out.
