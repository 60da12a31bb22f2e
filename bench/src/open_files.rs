//! The limit on open files, which servers and clients inherit.

use std::process::Command;

use anyhow::{Context, Result};

/// Raises the limit to `wanted` files, or to the highest permitted value, by restarting this program with it. Returns
/// the limit.
pub(super) fn raise(wanted: usize) -> Result<usize> {
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap_or_default();
    let numbers: Vec<usize> = line.split_whitespace().filter_map(|number| number.parse().ok()).collect();
    let [soft, hard] = numbers[..] else { return Ok(usize::MAX) };
    let wanted = hard.min(wanted);
    if soft >= wanted {
        return Ok(soft);
    }
    let mut again = Command::new("sh");
    again.args(["-c", &format!("ulimit -S -n {wanted} && exec \"$@\""), "sh"]);
    again.arg(std::env::current_exe()?).args(std::env::args_os().skip(1));
    let status = again.status().context("cannot restart with more open files")?;
    std::process::exit(status.code().unwrap_or(1))
}
