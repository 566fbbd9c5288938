//! What the release before left on disk and says over the network, against today's controller and agent as users run them.
//! `tests/formats/README.md` says how `before/` was made.

mod rest;

use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use flexcomm_wire::PROTOCOL;
use serde_json::{Value, json};

const BEFORE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/formats/before");
const TOKEN: &str = "a-token-0123456789";
/// Far above what any of it takes.
const LIMIT: Duration = Duration::from_secs(60);

fn answers() -> Value {
    let text = std::fs::read_to_string(Path::new(BEFORE).join("answers.json")).expect("the answers of before");
    serde_json::from_str(&text).expect("JSON")
}

fn until<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let since = Instant::now();
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(since.elapsed() < LIMIT, "waited too long for {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A process that ends with the test.
struct Daemon(Child);

impl Daemon {
    /// `args` have no spaces in them.
    fn start(folder: &Path, args: &str) -> Self {
        let name = args.split(' ').next().expect("a command");
        let log = std::fs::File::create(folder.join(format!("{name}.log"))).expect("a log");
        let token = folder.join("token");
        std::fs::write(&token, TOKEN).expect("the token's file");
        let mut command = Command::new(env!("CARGO_BIN_EXE_flexcomm"));
        command.args(args.split_whitespace()).arg("--token-file").arg(token).stderr(log);
        Self(command.spawn().expect("flexcomm starts"))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Today's controller on a copy of the database of before.
fn controller(folder: &Path, listen: SocketAddr) -> Daemon {
    let db = folder.join("controller.db");
    std::fs::copy(Path::new(BEFORE).join("controller.db"), &db).expect("a copy of the database");
    let daemon = Daemon::start(folder, &format!("controller --listen {listen} --db {}", db.display()));
    until("the controller", || rest::ask(listen, "GET /readyz", "\r\n").ok().filter(|(status, _)| *status == 200));
    daemon
}

/// Today's text of a strategy that the release before wrote as a text of its own or as an object; none of what is no strategy.
fn text(before: &Value) -> Option<String> {
    let part = |key: &str| before.get(key).and_then(Value::as_str);
    let before = match before {
        Value::String(text) => text.clone(),
        _ => {
            let selection = part("selection").map(|selection| format!(":{selection}")).unwrap_or_default();
            format!("{}@{}/{}{selection}", part("compressor")?, before.get("cr")?, part("collective")?)
        }
    };
    let (compressor, rest) = before.split_once('@')?;
    let (cr, collective) = rest.split_once('/')?;
    Some(match compressor {
        "none" => format!("none/{collective}"),
        _ => format!("{compressor}(k={cr})+ef(vanilla)/{collective}"),
    })
}

/// Paths and keys of the release before that are answered no longer: of the model that was fitted beside what is believed.
const WITHDRAWN: [&str; 3] = ["coefficients", "model_sync_us", "settled"];

/// Asserts that everything of `before` is in `now`, which may have more keys; `at` names the place.
fn assert_kept(at: &str, before: &Value, now: &Value) {
    match (before, now) {
        (Value::Array(before), Value::Array(now)) => {
            assert_eq!(before.len(), now.len(), "entries of {at}");
            for (i, (before, now)) in before.iter().zip(now).enumerate() {
                assert_kept(&format!("{at}[{i}]"), before, now);
            }
        }
        (before, Value::String(now)) if text(before).is_some() => assert_eq!(text(before).as_ref(), Some(now), "{at}"),
        (Value::Object(before), Value::Object(now)) => {
            // What is absent now had no value.
            let is_asked =
                |key: &str, before: &Value| now.contains_key(key) || !before.is_null() && !WITHDRAWN.contains(&key);
            for (key, before) in before.iter().filter(|(key, before)| is_asked(key, before)) {
                let now = now.get(key).unwrap_or_else(|| panic!("{at} has no {key}"));
                assert_kept(&format!("{at}.{key}"), before, now);
            }
        }
        _ => assert_eq!(before, now, "{at}"),
    }
}

#[test]
fn a_database_of_the_release_before_answers_all_that_it_answered() {
    let folder = tempfile::tempdir().expect("a folder");
    let listen = rest::free_address();
    let _controller = controller(folder.path(), listen);
    let answers = answers();
    let paths = answers.as_object().expect("answers by path");
    for (path, before) in paths.iter().filter(|(path, _)| !WITHDRAWN.contains(&path.as_str())) {
        let mut before = before.clone();
        if path == "nodes" {
            // No agent runs.
            for node in before.as_array_mut().into_iter().flatten() {
                let gone = ["live", "heartbeat_age_ms", "spooled"];
                node.as_object_mut().expect("a node").retain(|key, _| !gone.contains(&key.as_str()));
            }
        }
        assert_kept(path, &before, &rest::get(listen, &format!("/api/v1/{path}")));
    }
    let decisions = answers["jobs/decided/history"].as_array().expect("decisions");
    assert!(decisions.len() >= 2 && decisions.iter().any(|d| d["compressor"] == "topk"), "{decisions:?}");
    let now = rest::get(listen, "/api/v1/jobs/decided/history");
    for (before, now) in decisions.iter().zip(now.as_array().expect("decisions")) {
        assert_eq!(now["strategy"].as_str(), text(before).as_deref(), "decision {}", now["version"]);
    }
    let metrics = rest::ask(listen, "GET /metrics", "\r\n").expect("metrics").1;
    let damaged = metrics.lines().find(|line| line.starts_with("flexcomm_store_damaged_rows"));
    assert!(damaged.is_some_and(|line| line.ends_with(" 0")), "{damaged:?}");
}

#[test]
fn an_agent_of_the_release_before_is_refused_with_both_versions_and_what_to_do() {
    let folder = tempfile::tempdir().expect("a folder");
    let listen = rest::free_address();
    let _controller = controller(folder.path(), listen);
    let register = json!({
        "protocol": 1, "node": "c", "instance": 5, "previous": [], "addr": "127.0.0.1", "echo_port": 7071,
        "throughput_port": 7072, "may_shape": false, "software": "0.1.0",
    })
    .to_string();
    let rest = format!(
        "Authorization: Bearer {TOKEN}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{register}",
        register.len()
    );
    let (status, body) = rest::ask(listen, "POST /api/v1/agents/register", &rest).expect("an answer");
    assert_eq!(status, 422, "{body}");
    assert!(
        body.contains(&format!(
            "the agent speaks protocol 1, this controller speaks {PROTOCOL}; run the same version on both"
        )),
        "{body}"
    );
    assert_eq!(rest::get(listen, "/api/v1/nodes").as_array().map(Vec::len), Some(2), "it is not among the nodes");
}

/// Today's agent in a copy of the folder of before.
struct Agent {
    _daemon: Daemon,
    socket: PathBuf,
    log: PathBuf,
}

impl Agent {
    fn start(folder: &Path, controller: SocketAddr) -> Self {
        let (run, state) = (folder.join("run"), folder.join("state"));
        let done = Command::new("cp").arg("-r").arg(Path::new(BEFORE).join("agent")).arg(&state).status();
        assert!(done.is_ok_and(|status| status.success()), "a copy of the agent's folder");
        let [echo, throughput] = [rest::free_address(), rest::free_address()].map(|address| address.port());
        let daemon = Daemon::start(
            folder,
            &format!(
                "agent --node a --controller http://{controller} --listen 127.0.0.1 --advertise 127.0.0.1 \
                 --echo-port {echo} --throughput-port {throughput} --run-dir {} --state-dir {}",
                run.display(),
                state.display()
            ),
        );
        let socket = run.join("agent.sock");
        until("the agent's socket", || UnixStream::connect(&socket).ok());
        Self { _daemon: daemon, socket, log: folder.join("agent.log") }
    }

    /// Rank 0 of job `decided`, which begins with its hello.
    fn trainer(&self, protocol: u32) -> Trainer {
        let stream = UnixStream::connect(&self.socket).expect("the agent listens");
        stream.set_read_timeout(Some(LIMIT)).expect("a timeout");
        let mut trainer = Trainer(BufReader::new(stream));
        trainer.send(&json!({
            "kind": "hello", "protocol": protocol, "job": "decided", "run": answers()["jobs/decided"]["run"], "rank": 0, "world": 2,
            "gradient_values": 50890, "backend": "lab-tcp", "collectives": ["dense-ring", "allgather"],
            "codecs": [{"compressor": "topk", "header_bytes": 16, "index_bytes": 4.0, "value_bytes": 4.0}],
        }));
        trainer
    }

    fn log(&self) -> String {
        std::fs::read_to_string(&self.log).expect("its log")
    }
}

struct Trainer(BufReader<UnixStream>);

impl Trainer {
    fn send(&mut self, message: &Value) {
        writeln!(self.0.get_mut(), "{message}").expect("the agent reads");
    }

    fn next(&mut self) -> Value {
        let mut line = String::new();
        self.0.read_line(&mut line).expect("an answer");
        serde_json::from_str(&line).expect("JSON")
    }
}

#[test]
fn an_agent_s_folder_of_the_release_before_gives_its_decision_and_delivers_its_reports() {
    let folder = tempfile::tempdir().expect("a folder");
    let listen = rest::free_address();
    let agent = Agent::start(folder.path(), listen);

    let refused = agent.trainer(1).next();
    assert_eq!(refused["kind"], "refused", "{refused}");
    let reason = format!("the trainer speaks protocol 1, this agent speaks {PROTOCOL}; use the same version");
    assert_eq!(refused["reason"], reason);

    // The controller is away.
    let mut trainer = agent.trainer(PROTOCOL);
    assert_eq!(trainer.next()["kind"], "welcome");
    let decision = &trainer.next()["decision"];
    let before = &answers()["jobs/decided/decision"];
    assert_eq!(decision["version"], before["version"], "{decision}\n{}", agent.log());
    assert_eq!(decision["strategy"].as_str(), text(before).as_deref(), "{decision}");
    let (version, digest) = (&decision["version"], &decision["digest"]);
    let applied =
        json!({"kind": "applied", "job": "decided", "rank": 0, "version": version, "digest": digest, "step": 400});
    trainer.send(&applied);
    trainer.send(&json!({"kind": "bye"}));

    let _controller = controller(folder.path(), listen);
    let rejected = rest::get(listen, "/api/v1/rejected-reports");
    let ended = |job: &str| {
        let (status, body) = rest::ask(listen, &format!("GET /api/v1/jobs/{job}"), "\r\n").expect("an answer");
        let job: Value = serde_json::from_str(&body).expect("JSON");
        (status == 200 && !job["ended"].is_null()).then_some(job)
    };
    let job = until("the reports that were in the spool", || ended("spooled"));
    assert_eq!((&job["world"], &job["step"], &job["ended"]["how"]), (&json!(2), &json!(59), &json!("left")), "{job}");
    let end = |job: &Value| job["ended"]["at_us"].as_u64();
    until("the rank that came back and left", || {
        ended("decided").filter(|job| end(job) > end(&answers()["jobs/decided"]))
    });
    assert_eq!(
        rest::get(listen, "/api/v1/rejected-reports"),
        rejected,
        "none is lost, the digest is the stored decision's"
    );
}
