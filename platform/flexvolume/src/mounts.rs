//! The mount table of the kernel.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Whether something is mounted at this path.
pub fn is_mount_point(path: &Path) -> bool {
    let text = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    mounts_below(&text, path).iter().any(|mount| mount == path)
}

/// The device, or another source, of what is mounted at this path; `None`: nothing is.
pub fn source_of(path: &Path) -> Option<String> {
    source_in(&fs::read_to_string("/proc/self/mountinfo").ok()?, path)
}

/// The source of the last mount at a path. It follows the fields of variable number, after the file system's type.
fn source_in(mountinfo: &str, path: &Path) -> Option<String> {
    let line = mountinfo
        .lines()
        .rev()
        .find(|line| line.split(' ').nth(4).is_some_and(|point| unescaped(point) == path))?;
    let (_, rest) = line.split_once(" - ")?;
    Some(unescaped(rest.split(' ').nth(1)?).to_string_lossy().into_owned())
}

/// The kernel escapes a space as \040.
fn unescaped(field: &str) -> PathBuf {
    PathBuf::from(field.replace("\\040", " "))
}

/// The mount points at or below a folder, the innermost first, from the text of `/proc/self/mountinfo`.
pub fn mounts_below(mountinfo: &str, folder: &Path) -> Vec<PathBuf> {
    let points = mountinfo.lines().filter_map(|line| line.split(' ').nth(4));
    let mut below: Vec<PathBuf> = points.map(unescaped).filter(|point| point.starts_with(folder)).collect();
    below.reverse();
    below
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_are_unmounted_from_the_inside_out() {
        let text = "22 1 0:1 / / rw - ext4 /dev/vda rw\n30 22 0:2 / /v/u/a rw - tmpfs tmpfs rw\n\
                    31 30 0:3 / /v/u/a/b\\040c rw - tmpfs tmpfs rw\n32 22 0:4 / /v/user rw - tmpfs tmpfs rw\n";
        assert_eq!(
            mounts_below(text, Path::new("/v/u")),
            [PathBuf::from("/v/u/a/b c"), PathBuf::from("/v/u/a")]
        );
        let text = format!(
            "{text}33 22 8:1 / /v/d rw shared:1 - ext4 /dev/sd\\040b rw\n34 33 8:2 / /v/d rw - xfs /dev/sdc rw\n"
        );
        let source = |path: &str| source_in(&text, Path::new(path));
        assert_eq!(source("/v/d").as_deref(), Some("/dev/sdc"));
        assert_eq!(source("/v/u/a/b c").as_deref(), Some("tmpfs"));
        assert_eq!(source("/v/u"), None);
    }
}
