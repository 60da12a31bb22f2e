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

/// The mount points at or below a folder, the innermost first, from the text of `/proc/self/mountinfo`.
pub fn mounts_below(mountinfo: &str, folder: &Path) -> Vec<PathBuf> {
    let points = mountinfo.lines().filter_map(|line| line.split(' ').nth(4));
    // The kernel escapes a space as \040.
    let points = points.map(|point| PathBuf::from(point.replace("\\040", " ")));
    let mut below: Vec<PathBuf> = points.filter(|point| point.starts_with(folder)).collect();
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
    }
}
