use super::*;

fn with_token() -> Overrides {
    Overrides { token: Some("a-test-token".into()), ..Overrides::default() }
}

fn parse(text: &str) -> Result<Config, ConfigError> {
    Config::parse(text, with_token())
}

fn error(text: &str) -> String {
    parse(text).unwrap_err().to_string()
}

#[test]
fn the_sample_is_valid_and_shows_the_defaults() {
    let sample = parse(SAMPLE).unwrap();
    let empty = parse("").unwrap();
    assert_eq!(format!("{sample:?}"), format!("{empty:?}"));
}

#[test]
fn the_sample_names_every_key_and_no_other() {
    let written: Vec<String> = SAMPLE
        .lines()
        .filter_map(|line| line.trim_start_matches("# ").split_once(" = "))
        .map(|(key, _)| key.to_owned())
        .filter(|key| !key.contains([' ', '`']))
        .collect();
    let top = raw::keys::<Raw>();
    let shaping = raw::keys::<RawShaping>();
    let known = top.iter().chain(&shaping).filter(|key| *key != "shaping");
    for key in known.clone() {
        assert!(written.iter().any(|w| w == key), "{key} is missing in the sample");
    }
    assert_eq!(written.len(), known.count());
    // Uncommented, it still parses: the commented values are valid too.
    let all: String = SAMPLE
        .lines()
        .map(|line| match line.strip_prefix("# ") {
            Some(rest)
                if rest.split_once(" = ").is_some_and(|(k, _)| top.iter().any(|key| key == k)) && k_not_file(rest) =>
            {
                format!("{rest}\n")
            }
            _ => format!("{line}\n"),
        })
        .collect();
    parse(&all).unwrap();
}

/// `token` and `token_file` exclude each other, and the file is not there.
fn k_not_file(line: &str) -> bool {
    !line.starts_with("token_file")
}

#[test]
fn typos_are_named_with_line_and_nearest_key() {
    let text = error("node = \"a\"\n\ncontoller = \"http://x\"\n");
    assert_eq!(text, "line 3: unknown key `contoller`, did you mean `controller`?");
    let text = error("[shaping]\nalow = true\n");
    assert_eq!(text, "line 2: unknown key `alow`, did you mean `allow`?");
    assert!(error("[shapping]\n").contains("did you mean `shaping`?"));
    assert!(error("xyzzyplugh = 1").contains("the keys are advertise, controller"));
}

#[test]
fn wrong_types_and_syntax_are_placed() {
    assert!(error("echo_port = \"x\"").contains("line 1"), "{}", error("echo_port = \"x\""));
    assert!(error("a\nb").contains("line 1"));
    assert!(error("echo_port = 70000").contains("70000"));
}

#[test]
fn values_out_of_range_are_named() {
    for (text, key) in [
        ("node = \"a b\"", "node"),
        ("controller = \"https://x\"", "controller"),
        ("controller = \"10.0.0.1:7070\"", "controller"),
        ("controller = \"http://u@h\"", "controller"),
        ("listen = \"localhost\"", "listen"),
        ("advertise = \"0.0.0.0\"", "advertise"),
        ("echo_port = 0", "echo_port"),
        ("run_dir = \"\"", "run_dir"),
        ("socket_mode = \"0999\"", "socket_mode"),
        ("probe_share = 0.5", "probe_share"),
        ("probe_share = nan", "probe_share"),
        ("ping_hosts = [\"\"]", "ping_hosts"),
        ("ping_hosts = [\"a host\"]", "ping_hosts"),
        ("ping_hosts = [\"1\",\"2\",\"3\",\"4\",\"5\",\"6\",\"7\",\"8\",\"9\"]", "ping_hosts"),
        ("spool_limit_bytes = 1", "spool_limit_bytes"),
        ("report_interval = \"1\"", "report_interval"),
        ("report_interval = \"0s\"", "report_interval"),
        ("log = \"loud\"", "log"),
        ("metrics_listen = \"7073\"", "metrics_listen"),
        ("[shaping]\nallow = true", "shaping.interfaces"),
        ("[shaping]\ninterfaces = [\"a\", \"b\"]", "shaping.interfaces"),
        ("[shaping]\ninterfaces = [\"a/b\"]", "shaping.interfaces"),
        ("[shaping]\nlease = \"1ms\"", "shaping.lease"),
    ] {
        let error = error(text);
        assert!(error.starts_with(&format!("`{key}` is ")), "{text}: {error}");
    }
}

#[test]
fn errors_read_as_sentences_and_name_a_cause_once() {
    let said = "`probe_share` is 0.5, allowed is 0.0001 to 0.2";
    assert_eq!(error("probe_share = 0.5"), said);
    assert!(error("node = \"a b\"").starts_with("`node` is \"a b\", allowed is "));
    let absent = Config::load(Some("/none.toml".as_ref()), with_token()).unwrap_err();
    assert_eq!(absent.to_string().matches("No such file").count(), 1, "{absent}");
    assert!(std::error::Error::source(&absent).is_none(), "a reader of the chain would print it twice");
}

#[test]
fn the_token_is_needed_and_never_shown() {
    assert!(Config::parse("", Overrides::default()).unwrap_err().to_string().contains("--token-file"));
    let bad = Overrides { token: Some("se cret".into()), ..Overrides::default() };
    assert!(!Config::parse("", bad).unwrap_err().to_string().contains("cret"));
    let short = Overrides { token: Some("short".into()), ..Overrides::default() };
    assert!(Config::parse("", short).unwrap_err().to_string().contains("8 to 1024"));
    let both = Config::parse("token = \"a\"\ntoken_file = \"/b\"", Overrides::default());
    assert!(both.unwrap_err().to_string().contains("not both"));
    assert!(!format!("{:?}", parse("").unwrap()).contains("a-test-token"));
}

#[test]
fn overrides_beat_the_file() {
    let overrides = Overrides { node: Some("flag".into()), echo_port: Some(9), ..with_token() };
    let config = Config::parse("node = \"file\"\nthroughput_port = 8\ntoken_file = \"/absent\"", overrides).unwrap();
    assert_eq!((config.node.as_str(), config.echo_port, config.throughput_port), ("flag", 9, 8));
    assert_eq!(config.token.reveal(), "a-test-token");
}

#[test]
fn what_is_printed_reads_back_the_same_and_hides_the_token() {
    let more = "node = \"a\"\nadvertise = \"10.0.0.1\"\nmetrics_listen = \"127.0.0.1:7073\"\nreport_interval = \"250ms\"\n\
        socket_mode = \"0600\"\nlog = \"debug\"\n[shaping]\nallow = true\ninterfaces = [\"eth1\"]\nlease = \"3s\"\n";
    for config in [parse("node = \"b\"").unwrap(), parse(more).unwrap()] {
        let text = config.to_toml().unwrap();
        assert!(!text.contains("a-test-token"), "{text}");
        assert_eq!(format!("{:?}", parse(&text).unwrap()), format!("{config:?}"), "{text}");
    }
}

#[test]
fn what_is_wrong_is_named_with_its_file_or_flag() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("agent.toml");
    let said = |text: &str, overrides: Overrides| {
        std::fs::write(&path, text).unwrap();
        Config::load(Some(&path), overrides).unwrap_err().to_string()
    };
    let file = path.display();
    let typo = said("nod = \"a\"", with_token());
    assert_eq!(typo, format!("{file}: line 1: unknown key `nod`, did you mean `node`?"));
    for text in ["probe_share = 0.5", "a\nb", "echo_port = \"x\"", "token = \"a\"\ntoken_file = \"b\""] {
        let error = said(text, if text.contains("token") { Overrides::default() } else { with_token() });
        assert!(error.starts_with(&format!("{file}: ")), "{error}");
    }
    let flag = said("echo_port = 1", Overrides { echo_port: Some(0), ..with_token() });
    assert!(flag.starts_with("--echo-port or FLEXCOMM_ECHO_PORT: `echo_port` is 0"), "{flag}");
    let listen = Config::load(None, Overrides { listen: Some("x".into()), ..with_token() }).unwrap_err().to_string();
    assert!(listen.starts_with("--listen or FLEXCOMM_AGENT_LISTEN: `listen` is \"x\""), "{listen}");
    let token = said("token_file = \"/none/token\"", Overrides::default());
    assert!(token.starts_with(&format!("{file}: the token file /none/token: No such file")), "{token}");
    assert!(said("", Overrides::default()).contains("--token-file"));
}
