//! The intrinsic functions, `States.*`.
