//! The controller as a process of its own: this test binary, started again for its test `server_when_asked`.

use super::{Api, TIMEOUT, config};
use flexcomm_controller::serve_on;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Set for the child that is the server: the folder of its files.
const FOLDER: &str = "FLEXCOMM_TEST_SERVER_FOLDER";

/// For a child that shall use another file for its token.
pub const TOKEN_FILE: &str = "FLEXCOMM_TEST_TOKEN_FILE";

/// Not a test of its own: with the variable set, this process is the server and does not return.
#[tokio::test]
async fn server_when_asked() {
    let Ok(folder) = std::env::var(FOLDER) else { return };
    let folder = PathBuf::from(folder);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = folder.join(format!("port-{}", std::process::id()));
    std::fs::write(port.with_extension("new"), listener.local_addr().unwrap().port().to_string()).unwrap();
    std::fs::rename(port.with_extension("new"), port).unwrap();
    let mut config = config(&folder);
    if let Ok(token_file) = std::env::var(TOKEN_FILE) {
        config.token_file = token_file.into();
    }
    if let Err(error) = serve_on(listener, config.validate().unwrap(), std::future::pending()).await {
        std::fs::write(folder.join("error"), error.to_string()).unwrap();
        std::process::exit(1);
    }
}

/// Killed when dropped.
pub struct Process(pub Child);

impl Process {
    pub fn command(folder: &Path) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        Self::as_server(&mut command, folder);
        command
    }

    /// The same, started by a shell after `script`, which finds the folder in `$0`.
    pub fn behind(script: &str, folder: &Path) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("{script} && exec \"$@\"")]).arg(folder).arg(std::env::current_exe().unwrap());
        Self::as_server(&mut command, folder);
        command
    }

    fn as_server(command: &mut Command, folder: &Path) {
        command.args(["--exact", "common::process::server_when_asked", "--nocapture"]).env(FOLDER, folder);
        command.stdout(Stdio::null()).stderr(Stdio::null());
    }

    pub async fn start(folder: &Path) -> (Self, Api) {
        Self::spawn(Self::command(folder), folder).await
    }

    /// Waits until the server is ready.
    pub async fn spawn(mut command: Command, folder: &Path) -> (Self, Api) {
        let process = Self(command.spawn().unwrap());
        let file = process.path(&folder.join(format!("port-{}", process.0.id())));
        let since = Instant::now();
        loop {
            if let Ok(port) = std::fs::read_to_string(&file) {
                let api = Api::new(&format!("http://127.0.0.1:{port}"));
                let ready = api.client.get(format!("{}/readyz", api.url)).send().await;
                if ready.is_ok_and(|r| r.status().is_success()) {
                    return (process, api);
                }
            }
            assert!(since.elapsed() < TIMEOUT, "the server did not come up");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// A path as the process sees it: it may have a mount of its own.
    pub fn path(&self, path: &Path) -> PathBuf {
        Path::new(&format!("/proc/{}/root", self.0.id())).join(path.strip_prefix("/").unwrap())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
