//! The database is for the controller's user alone, whatever the umask: it says which jobs ran and how well.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Of the database and what lies beside it.
const MODE: u32 = 0o600;
/// What sqlite adds to the name for its log and the log's index. It makes them with the mode of the database.
const BESIDE: [&str; 3] = ["", "-wal", "-shm"];

/// Makes the file before sqlite does, which would make it for all to read, and sets the mode of files of before. What
/// cannot be made or opened is for sqlite to say.
pub(super) fn prepare(db: &Path) {
    let _ = OpenOptions::new().write(true).create_new(true).mode(MODE).open(db);
    for end in BESIDE {
        let mut path = db.as_os_str().to_owned();
        path.push(end);
        let path = PathBuf::from(path);
        match std::fs::set_permissions(&path, Permissions::from_mode(MODE)) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                tracing::warn!(path = %path.display(), "others may read this file: failed to set its mode: {error}");
            }
            _ => {}
        }
    }
}

/// Opens a file beside the database, or makes it.
pub(super) fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    let file = options.read(true).write(true).create(true).truncate(false).mode(MODE).open(path)?;
    file.set_permissions(Permissions::from_mode(MODE))?;
    Ok(file)
}
