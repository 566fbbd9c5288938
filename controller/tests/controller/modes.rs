//! Who may read what the controller keeps. A test of its own process: the umask is the process's.

use crate::common::{Server, config};
use nix::sys::stat::{Mode, umask};
use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// By name, octal.
fn modes(folder: &Path) -> BTreeMap<String, String> {
    let entries = std::fs::read_dir(folder).unwrap().map(Result::unwrap);
    let mode = |entry: &std::fs::DirEntry| format!("{:o}", entry.metadata().unwrap().permissions().mode() & 0o777);
    entries.map(|entry| (entry.file_name().into_string().unwrap(), mode(&entry))).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_database_is_for_its_user_alone_whatever_the_umask() {
    umask(Mode::empty());
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(folder.path());
    config.token_file = folder.path().join("made token");
    std::fs::remove_file(folder.path().join("token")).unwrap();
    let server = Server::start(config.clone()).await.ready().await;
    let made = modes(folder.path());
    for file in ["test.db", "test.db-wal", "test.db-shm", "test.db.lock", "made token"] {
        assert!(made.contains_key(file), "{file} of {made:?}");
    }
    assert!(made.values().all(|mode| mode == "600"), "{made:?}");
    server.stop().await;

    // Those of a controller that made them for all.
    let open = |file| std::fs::set_permissions(folder.path().join(file), PermissionsExt::from_mode(0o666)).unwrap();
    ["test.db", "test.db.lock"].into_iter().for_each(open);
    let server = Server::start(config).await.ready().await;
    let found = modes(folder.path());
    assert!(found.values().all(|mode| mode == "600"), "{found:?}");
    server.stop().await;
}
