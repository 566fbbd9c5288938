use super::*;
use clap::Parser;

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: Args,
}

fn plan(line: &str) -> Result<Plan> {
    // Of these tests' numbers top-k's are known.
    let default = if line.contains("--compressor") { "" } else { "--compressors topk --selection star" };
    let words = std::iter::once("plan").chain(line.split_whitespace()).chain(default.split_whitespace());
    Plan::make(&Cli::try_parse_from(words)?.args)
}

const BASE: &str = "--params 25.56M --workers 8 --latency 1ms --bandwidth 10gbit";

#[test]
fn json_has_the_documented_shape() {
    let json = plan(&format!("{BASE} --crs 0.1,0.01,0.001")).unwrap().json();
    let costs = json["costs"].as_array().unwrap();
    let sums = Collective::ALL.iter().filter(|collective| collective.is_allreduce()).count();
    assert_eq!(costs.len(), sums + 3 * (Collective::ALL.len() - sums));
    for entry in costs.iter().chain(json["front"].as_array().unwrap()) {
        for key in ["cr", "t_comp_s", "t_sync_s", "t_step_s", "gain"] {
            assert!(entry[key].is_f64(), "{key} of {entry}");
        }
        assert!(entry["collective"].is_string());
    }
    assert!(json["choice"]["why"].is_string() && json["choice"]["collective"].is_string());
    // Equation (4a) of the paper, whose 4 bytes an index make 55.6 ms; Elias-Fano's 5.25 bits make 35.3 ms.
    let art_ring = costs.iter().find(|c| c["collective"] == "art-ring" && c["cr"] == 0.1).unwrap();
    assert!((art_ring["t_sync_s"].as_f64().unwrap() - 0.0353).abs() < 0.0001, "{art_ring}");
}

#[test]
fn people_are_told_what_was_assumed_and_when_dense_is_best() {
    let text = table::render(&plan("--params 1M --workers 2 --latency 1us --bandwidth 400gbit").unwrap());
    assert!(text.contains("Assumed: gain(c)") && text.contains("Assumed: no --compute was given"), "{text}");
    assert!(text.contains("Dense is best here at any gain"), "{text}");
    let slow = table::render(&plan("--params 60M --workers 8 --latency 50ms --bandwidth 100mbit").unwrap());
    assert!(!slow.contains("Dense is best") && !slow.contains("dense is best: no"), "{slow}");
    assert_eq!(slow.lines().filter(|l| l.starts_with("> ")).count(), 1, "{slow}");
}

fn about_compute(plan: &Plan) -> &str {
    plan.assumed.iter().find(|a| a.contains("no --compute was given")).unwrap()
}

/// Whether a plan of these words is dense, by its compute time.
fn is_dense(words: &str, compute: &str) -> bool {
    plan(&format!("{words} --compute {compute}")).unwrap().solved.choice.cr == 1.0
}

/// The other policies go from dense to a small ratio and back as the compute time grows.
#[test]
fn only_time_to_quality_names_a_compute_time_from_which_on_dense_is_best() {
    let words = "--params 10M --workers 2 --latency 10ms --bandwidth 10gbit --policy";
    for policy in ["knee", "weights"] {
        let said = plan(&format!("{words} {policy}")).unwrap();
        assert!(about_compute(&said).ends_with("its largest share: give it for real step times"), "{:?}", said.assumed);
    }
    let knee = format!("{words} knee");
    assert!(is_dense(&knee, "0s") && !is_dense(&knee, "1us") && !is_dense(&knee, "1ms") && is_dense(&knee, "50ms"));
}

#[test]
fn dense_is_best_from_the_named_compute_time_on() {
    let networks = [
        "2 --latency 1ms --bandwidth 100mbit",
        "8 --latency 1ms --bandwidth 1gbit",
        "64 --latency 50us --bandwidth 2gbit",
    ];
    for (network, more) in
        networks.iter().flat_map(|n| ["", " --overlap 3", " --exponent 0.5", " --gain-floor 0.15"].map(|m| (n, m)))
    {
        let words = format!("--params 25M --workers {network}{more}");
        let said = plan(&words).unwrap();
        let from = about_compute(&said)
            .split_once("backward pass takes ")
            .unwrap_or_else(|| panic!("{words}: {said:?}", said = said.assumed))
            .1;
        let from: Seconds = from.split_once(" or more").unwrap().0.replace(' ', "").parse().unwrap();
        for (factor, expected) in [(0.01, false), (0.9, false), (1.0, true), (2.0, true), (100.0, true)] {
            assert_eq!(
                is_dense(&words, &format!("{}s", factor * from.get())),
                expected,
                "{words} at {factor} x {from}"
            );
        }
    }
    let lossless = plan("--params 25M --workers 8 --latency 1ms --bandwidth 1gbit --exponent 0").unwrap();
    assert!(about_compute(&lossless).ends_with("give it for real step times"), "{:?}", lossless.assumed);
}

#[test]
fn arguments_are_checked() {
    for (bad, expected) in [
        ("--params 25X --workers 8 --latency 1ms --bandwidth 10gbit", "25X"),
        ("--params 0 --workers 8 --latency 1ms --bandwidth 10gbit", "0 values"),
        ("--params 1M --workers 0 --latency 1ms --bandwidth 10gbit", "0"),
        ("--params 1M --workers 8 --latency 1 --bandwidth 10gbit", "number with a unit"),
        ("--params 1M --workers 8 --latency -1ms --bandwidth 10gbit", "-1ms"),
        ("--params 1M --workers 8 --latency 1ms --bandwidth 0gbit", "bandwidth"),
        ("--params 1M --workers 8 --latency 1ms", "--bandwidth"),
        ("--params 1M --workers 8 --latency 1ms --bandwidth 1gbit --crs 0.1,2", "compression ratio is 2"),
        ("--params 1M --workers 8 --latency 1ms --bandwidth 1gbit --crs 1", "dense"),
        ("--params 1M --workers 8 --latency 1ms --bandwidth 1gbit --overlap NaN", "NaN"),
        ("--params 1M --workers 8 --latency 1ms --bandwidth 1gbit --policy fastest", "fastest"),
        ("--params 1M --workers 8 --latency 1ms --bandwidth 1gbit --policy knee --gain-floor 0.5", "gain-floor"),
        (
            "--params 1M --workers 8 --latency 1ms --bandwidth 1gbit --gain /nonexistent/gain.csv",
            "/nonexistent/gain.csv",
        ),
    ] {
        let error = plan(bad).map(|_| ()).unwrap_err();
        let text = format!("{error:#}");
        assert!(text.contains(expected), "{bad}: {text}");
    }
}

#[test]
fn counts_are_read() {
    for (text, count) in [("25.56M", 25_560_000), ("1.2B", 1_200_000_000), ("110k", 110_000), ("4_096", 4096)] {
        assert_eq!(parse_count(text), Ok(count));
    }
    for bad in ["", "M", "-1", "1e99", "NaN", "1 2"] {
        assert!(parse_count(bad).is_err(), "{bad:?} was accepted");
    }
}

#[test]
fn gain_files_are_read_and_errors_name_line_and_value() {
    let rows = files::parse_gains("# mine\ncr,gain,t_comp_s\n0.1, 0.8, 0.002\n\n0.01,0.5,\n").unwrap();
    assert_eq!(rows.len(), 2);
    assert_eq!(rows[1].t_comp_s, None);
    for (bad, expected) in [
        ("", "empty"),
        ("0.1,0.8\n", "line 1: header"),
        ("cr,gain\n", "no ratios"),
        ("cr,gain\n0.1,0.8,0.9\n", "line 2: \"0.1,0.8,0.9\" has 3 cells"),
        ("cr,gain\n0.1,0.8\n0.01,high\n", "line 3: gain \"high\""),
        ("cr,gain\n0.1,1.8\n", "line 2: gain is 1.8"),
        ("cr,gain\n-0.1,0.8\n", "line 2: compression ratio is -0.1"),
        ("cr,gain,t_comp_s\n0.1,0.8,-2\n", "-2"),
    ] {
        let text = format!("{:#}", files::parse_gains(bad).map(|_| ()).unwrap_err());
        assert!(text.contains(expected), "{bad:?}: {text}");
    }
}

#[test]
fn link_files_are_read_and_errors_name_line_and_cell() {
    let links = files::parse_links("-,1ms/10gbit\n2ms/1gbit,\n").unwrap();
    assert_eq!(links.ranks(), 2);
    assert_eq!(links.get(1, 0), Link::new(2e-3, 1e9).unwrap());
    for (bad, expected) in [
        ("", "empty"),
        ("-,1ms/10gbit\n", "line 1: it has 2 cells, expected 1"),
        ("-,1ms\n1ms/1gbit,-\n", "line 1, cell 2: \"1ms\""),
        ("-,1ms/1gbit\n-1ms/1gbit,-\n", "line 2, cell 1: \"-1ms/1gbit\""),
        ("-,1ms/fast\n1ms/1gbit,-\n", "fast"),
    ] {
        let text = format!("{:#}", files::parse_links(bad).map(|_| ()).unwrap_err());
        assert!(text.contains(expected), "{bad:?}: {text}");
    }
}
