//! Reads files of an image in the folders of its layers, before the image is mounted. The image is untrusted: its links
//! must not lead to files of the host, and its files may be of any size.

use std::{
    ffi::OsString,
    fs,
    io::Read as _,
    path::{Path, PathBuf},
};

/// The maximum size of a file that is read, in bytes; a list of a million users is smaller.
const FILE_BYTES_MAX: u64 = 16 << 20;
/// The number of symbolic links that are followed for one file (the kernel's limit).
const LINKS_MAX: usize = 40;

/// The content of a file, with symbolic links followed within the image; empty if there is no such file. `layers`: the
/// topmost first. Blocks.
pub(super) fn read(layers: &[PathBuf], path: &str) -> String {
    let mut content = Vec::new();
    let read = find(layers, Path::new(path))
        .and_then(|file| fs::File::open(file).ok()?.take(FILE_BYTES_MAX).read_to_end(&mut content).ok());
    match read {
        Some(_) => String::from_utf8_lossy(&content).into_owned(),
        None => String::new(),
    }
}

/// The location of a regular file of the image in its layers.
fn find(layers: &[PathBuf], path: &Path) -> Option<PathBuf> {
    // The parts of the path that are left, the next one last.
    let parts = |path: &Path| -> Vec<OsString> {
        path.components().rev().map(|part| part.as_os_str().to_owned()).collect()
    };
    let (mut left, mut folder, mut links) = (parts(path), PathBuf::new(), 0);
    while let Some(part) = left.pop() {
        match part.as_encoded_bytes() {
            b"/" => folder.clear(),
            b"." => {}
            // The parent of the image's root is the root itself.
            b".." => {
                folder.pop();
            }
            _ => {
                let path = folder.join(&part);
                let (file, kind) = layers.iter().find_map(|layer| in_layer(layer, &path))?;
                if kind.is_symlink() {
                    links += 1;
                    if links > LINKS_MAX {
                        return None;
                    }
                    left.extend(parts(&fs::read_link(&file).ok()?));
                } else if kind.is_dir() {
                    folder = path;
                } else {
                    // A whiteout, which hides the file of a lower layer, is a device.
                    return (left.is_empty() && kind.is_file()).then_some(file);
                }
            }
        }
    }
    None
}

/// The file at a path of one layer. The path's parents in this layer must be folders: a link in their place is hidden
/// by a higher layer, and would lead to the host.
fn in_layer(layer: &Path, path: &Path) -> Option<(PathBuf, fs::FileType)> {
    let is_folder =
        |parent: &Path| fs::symlink_metadata(layer.join(parent)).is_ok_and(|found| found.is_dir());
    if !path.ancestors().skip(1).all(is_folder) {
        return None;
    }
    let file = layer.join(path);
    let kind = fs::symlink_metadata(&file).ok()?.file_type();
    Some((file, kind))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// Two empty layers, the topmost first.
    fn image() -> (tempfile::TempDir, Vec<PathBuf>) {
        let folder = tempfile::tempdir().unwrap();
        let layers: Vec<PathBuf> = ["top", "bottom"].map(|name| folder.path().join(name)).into();
        layers.iter().for_each(|layer| fs::create_dir(layer).unwrap());
        (folder, layers)
    }

    fn write(file: PathBuf, text: &str) {
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, text).unwrap();
    }

    #[test]
    fn links_are_followed_within_the_image() {
        let (_folder, layers) = image();
        write(layers[1].join("nix/store/x/passwd"), "app:x:1:");
        fs::create_dir(layers[0].join("etc")).unwrap();
        symlink("/nix/store/x/passwd", layers[0].join("etc/passwd")).unwrap();
        assert_eq!(read(&layers, "etc/passwd"), "app:x:1:");
        symlink("../nix/../nix/store", layers[0].join("etc/store")).unwrap();
        assert_eq!(read(&layers, "etc/store/x/passwd"), "app:x:1:");
        symlink("loop", layers[0].join("etc/loop")).unwrap();
        assert_eq!(read(&layers, "etc/loop"), "");
    }

    #[test]
    fn no_link_leads_to_the_host() {
        let (folder, layers) = image();
        write(folder.path().join("host/passwd"), "of the host");
        let host = folder.path().join("host");
        symlink(&host, layers[1].join("etc")).unwrap();
        assert_eq!(read(&layers, "etc/passwd"), "");
        // The link of the lower layer is hidden by a folder of the higher one.
        fs::create_dir(layers[0].join("etc")).unwrap();
        assert_eq!(read(&layers, "etc/passwd"), "");
        symlink("../../../../../host/passwd", layers[0].join("etc/group")).unwrap();
        assert_eq!(read(&layers, "etc/group"), "");
    }

    #[test]
    fn the_topmost_file_counts_and_its_size_is_limited() {
        let (_folder, layers) = image();
        write(layers[1].join("etc/passwd"), "below");
        assert_eq!(read(&layers, "etc/passwd"), "below");
        write(layers[0].join("etc/passwd"), "above\u{e9}");
        assert_eq!(read(&layers, "etc/passwd"), "above\u{e9}");
        assert_eq!(read(&layers, "etc/group"), "");
        let large = fs::File::create(layers[0].join("etc/passwd")).unwrap();
        // A sparse file that no memory holds.
        large.set_len(1 << 42).unwrap();
        assert_eq!(read(&layers, "etc/passwd").len() as u64, FILE_BYTES_MAX);
    }
}
