//! Releases the resident pages of this program's code, of which starting it used the most.

#![expect(unsafe_code, reason = "madvise takes an address; the block has a SAFETY comment")]

use std::{ffi::c_void, io, ops::Range, path::Path, ptr};

use rustix::mm::{Advice, madvise};

/// Releases the pages of the program's code from this process's memory. Code that runs afterwards is mapped again from
/// the page cache, some 0.5 µs for each 64 KiB; the remainder no longer counts as resident. Returns the number of bytes
/// of code in the address space.
///
/// # Errors
/// `/proc` cannot be read, or the kernel refuses the advice.
pub fn release_program_pages() -> io::Result<usize> {
    advise(Advice::LinuxDontNeed)
}

/// Gives the kernel an advice about the program's code that does not change its content; returns the code's bytes.
fn advise(advice: Advice) -> io::Result<usize> {
    let program = std::fs::read_link("/proc/self/exe")?;
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    let mut bytes = 0;
    for range in maps.lines().filter_map(|line| code_range(line, &program)) {
        let start = ptr::with_exposed_provenance_mut::<c_void>(range.start);
        // SAFETY: the mapping is file-backed and not writable, and position-independent code has no relocations in it,
        // so each page has the content of the file, from which the kernel maps it again at the next access. The
        // mapping refers to the file that was executed, even if its path is another file by now.
        unsafe { madvise(start, range.len(), advice) }?;
        bytes += range.len();
    }
    Ok(bytes)
}

/// The addresses of a line of `/proc/self/maps` (`START-END PERMISSIONS OFFSET DEVICE INODE PATH`), if it is code of
/// the program.
fn code_range(line: &str, program: &Path) -> Option<Range<usize>> {
    let (addresses, rest) = line.split_once(' ')?;
    let (permissions, rest) = rest.split_once(' ')?;
    let path = rest.splitn(4, ' ').nth(3)?.trim_start();
    if permissions != "r-xp" || Path::new(path) != program {
        return None;
    }
    let (start, end) = addresses.split_once('-')?;
    Some(usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_code_of_the_program_is_released() {
        let program = Path::new("/opt/my programs/mayfly");
        let range = |line: &str| code_range(line, program);
        let code = "5600000-5700000 r-xp 00001000 fe:00 42                         /opt/my programs/mayfly";
        assert_eq!(range(code), Some(0x560_0000..0x570_0000));
        for permissions in ["r--p", "rw-p", "r-xs"] {
            assert_eq!(range(&code.replace("r-xp", permissions)), None, "{permissions}");
        }
        assert_eq!(range("7f00000-7f10000 r-xp 00001000 fe:00 43      /usr/lib/libc.so.6"), None);
        assert_eq!(range("7f00000-7f10000 rw-p 00000000 00:00 0 "), None);
    }

    #[test]
    fn released_code_still_runs_and_counts_less() {
        let resident = || {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let line = status.lines().find(|line| line.starts_with("RssFile:")).unwrap();
            line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap()
        };
        // All of the code is resident, however little of it ran so far.
        advise(Advice::LinuxPopulateRead).unwrap();
        let before = resident();
        let code = release_program_pages().unwrap();
        assert!(code > 0 && resident() < before, "{before} KiB before, {} after", resident());
    }
}
