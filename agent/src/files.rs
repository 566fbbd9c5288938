//! Files and folders of the agent, and who may read them, whatever the umask: what it keeps says which jobs ran here and
//! how well, and is for its own user alone. What trainers of other users need is made with [`SHARED`].

use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

/// A file for this user alone.
const PRIVATE_FILE: u32 = 0o600;
/// A folder for this user alone.
pub(crate) const PRIVATE: u32 = 0o700;
/// The folder with the socket: trainers of other users look into it.
pub(crate) const SHARED: u32 = 0o755;

/// Opens a file for this user alone, or makes it. What is in it stays.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    let file = options.read(true).write(true).create(true).truncate(false).mode(PRIVATE_FILE).open(path)?;
    file.set_permissions(Permissions::from_mode(PRIVATE_FILE))?;
    Ok(file)
}

/// Opens an empty file for this user alone, made or emptied.
pub(crate) fn create(path: &Path) -> io::Result<File> {
    let file = open(path)?;
    file.set_len(0)?;
    Ok(file)
}

/// Makes a folder of this mode with those above it. One that is there already is left as its owner wants it.
pub(crate) fn make_folder(path: &Path, mode: u32) -> io::Result<()> {
    if let Some(above) = path.parent() {
        std::fs::create_dir_all(above)?;
    }
    match DirBuilder::new().mode(mode).create(path) {
        Ok(()) => std::fs::set_permissions(path, Permissions::from_mode(mode)),
        Err(error) if error.kind() == ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        Err(error) => Err(error),
    }
}

/// Makes a folder that is the agent's alone to use, or sets the mode of the one that is there.
pub(crate) fn own_folder(path: &Path, mode: u32) -> io::Result<()> {
    make_folder(path, mode)?;
    std::fs::set_permissions(path, Permissions::from_mode(mode))
}

/// Writes beside the file, fsyncs, renames over it and fsyncs the folder: after a crash the old or the new content
/// stands there, never a part. What a crash leaves beside it is hidden, and the next replacement's.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let mut hidden = std::ffi::OsString::from(".");
    hidden.push(path.file_name().ok_or(ErrorKind::InvalidInput)?);
    let temporary = folder.join(hidden).with_extension("new");
    let written = create(&temporary).and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()));
    if let Err(error) = written.and_then(|()| std::fs::rename(&temporary, path)) {
        // What a full disk took of it is room for others.
        let _ = std::fs::remove_file(&temporary);
        return Err(error);
    }
    File::open(folder)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replacement_that_fails_leaves_nothing_beside_the_old_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        // Nothing can be renamed over a folder.
        std::fs::create_dir(&path).unwrap();
        replace(&path, b"x").unwrap_err();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
