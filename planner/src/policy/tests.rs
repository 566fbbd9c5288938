use super::*;
use flexcomm_domain::{Collective, JobId};
use serde_json::json;

fn read(written: Value) -> JobPolicy {
    JobPolicy::read(&written).unwrap()
}

#[test]
fn every_key_is_optional_and_null_is_its_default() {
    assert_eq!(read(json!({})), JobPolicy::default());
    let nulls = json!({ "kinds": null, "objective": null, "least_gain": null, "most_overhead": null, "observe": null,
        "pin": null });
    assert_eq!(nulls.as_object().unwrap().len(), KEYS.len());
    assert!(read(nulls).is_default());
    let all = json!({ "kinds": ["u8bit", "topk"], "objective": { "name": "weights", "comp": 2.0 }, "least_gain": 0.25,
        "most_overhead": 0.1,
        "pin": { "strategy": "none/dense-ring | topk(k=0.01)+ef(vanilla)/allgather", "until": "2026-11-21T09:30:00+01:00" } });
    let policy = read(all);
    assert_eq!(
        policy.kinds.as_ref().unwrap().iter().map(CompressorKind::name).collect::<Vec<_>>(),
        ["eightbit", "topk"]
    );
    assert_eq!(policy.pin.as_ref().unwrap().until, Some(Timestamp(1_795_249_800_000_000)));
    assert_eq!(policy.pin.as_ref().unwrap().ends(), "until 2026-11-21T08:30:00Z");
    let text = serde_json::to_string(&policy).unwrap();
    assert!(text.contains(r#""until":"2026-11-21T08:30:00Z""#), "{text}");
    assert_eq!(serde_json::from_str::<JobPolicy>(&text).unwrap(), policy);
    assert_eq!(read(json!({ "objective": "knee" })).objective, Some(PolicyConfig::by_name("knee").unwrap()));
    assert!(read(json!({ "observe": true })).observe);
}

#[test]
fn what_is_not_allowed_is_refused_by_its_key() {
    for (bad, expected) in [
        (json!([]), "a policy is an object with any of the keys kinds, objective"),
        (json!({ "kind": ["topk"] }), "unknown key \"kind\", did you mean kinds?"),
        (json!({ "zebra": 1 }), "the keys are kinds, objective, least_gain, most_overhead, observe, pin"),
        (json!({ "compressors": ["topk"] }), "unknown key \"compressors\"; in its place: kinds"),
        (json!({ "policy": "knee" }), "unknown key \"policy\"; in its place: objective"),
        (json!({ "gain_floor": 0.5 }), "unknown key \"gain_floor\"; in its place: least_gain"),
        (json!({ "kinds": "topk" }), "kinds: expected a list of names such as [\"topk\"], found \"topk\""),
        (json!({ "kinds": [] }), "[\"none\"] is dense alone, and null is all"),
        (json!({ "kinds": ["topkk(k=0.1)"] }), "did you mean topk?"),
        (json!({ "kinds": ["topk(k=0.1)"] }), "kinds are names without parameters, allowed is \"topk\""),
        (json!({ "objective": "kneee" }), "objective: policy \"kneee\" is not one of time-to-quality, knee, weights"),
        (json!({ "objective": { "name": "knee", "zebra": 1 } }), "zebra"),
        (
            json!({ "objective": { "name": "time-to-quality", "gain_floor": 2 } }),
            "objective.gain_floor is 2, allowed is 0 to 1",
        ),
        (json!({ "least_gain": 1.5 }), "least_gain is 1.5, allowed is 0 to 1"),
        (json!({ "least_gain": "half" }), "least_gain: expected a number, 0 to 1, found \"half\""),
        (json!({ "most_overhead": -0.1 }), "most_overhead is -0.1, allowed is 0 or more"),
        (json!({ "observe": 1 }), "observe: expected true or false, found 1"),
        (json!({ "pin": "none" }), "pin: expected an object with the keys strategy and until"),
        (json!({ "pin": { "until": null } }), "pin.strategy: expected the text of a strategy"),
        (json!({ "pin": { "strategy": "zebra/allgather" } }), "pin.strategy: "),
        (
            json!({ "pin": { "strategy": "none/dense-ring", "untill": null } }),
            "unknown key \"untill\", did you mean until?",
        ),
        (
            json!({ "pin": { "strategy": "none/dense-ring", "until": "tomorrow" } }),
            "expected a time with its zone, from 1970 to 9999-12-30, as in RFC 3339",
        ),
        (json!({ "pin": { "strategy": "none/dense-ring", "until": "1969-01-01T00:00:00Z" } }), "from 1970 to"),
        (json!({ "observe": true, "pin": { "strategy": "none/dense-ring" } }), "observe and pin do not go together"),
    ] {
        let error = JobPolicy::read(&bad).unwrap_err().to_string();
        assert!(error.contains(expected), "{bad}: {error}");
    }
}

#[test]
fn what_another_release_stored_counts_as_far_as_it_is_known() {
    let stored = |text: &str| serde_json::from_str::<JobPolicy>(text).unwrap();
    assert!(stored(r#"{"kinds":null}"#).is_default());
    let policy = stored(r#"{"kinds":["topk","later"],"least_gain":0.5,"most_overhead":"some","later":1}"#);
    assert_eq!((policy.kinds.unwrap().len(), policy.least_gain, policy.most_overhead), (1, Some(0.5), None));
    assert_eq!(stored(r#"{"kinds":["later"]}"#).kinds, Some(BTreeSet::new()), "nothing but dense");
}

#[test]
fn snapshots_of_before_have_their_kinds() {
    let mut snapshot = Snapshot::new(JobId::new("j").unwrap(), 2, 1000);
    let text = serde_json::to_string(&snapshot).unwrap();
    assert!(!text.contains("kinds") && !text.contains(r#""policy":{}"#), "{text}");
    snapshot.policy.kinds = Some(["topk".parse().unwrap()].into());
    let before = text.replacen('{', r#"{"kinds":["topk"],"#, 1);
    assert_eq!(serde_json::from_str::<Snapshot>(&before).unwrap(), snapshot);
    let now = serde_json::to_string(&snapshot).unwrap();
    assert_eq!(serde_json::from_str::<Snapshot>(&now).unwrap(), snapshot);
}

#[test]
fn a_pin_ends_at_its_time() {
    let policy = |until: Value| read(json!({ "pin": { "strategy": "none/dense-ring", "until": until } }));
    let at = |policy: &JobPolicy, us| policy.pin_at(Timestamp(us)).is_some();
    let ends = policy(json!("1970-01-01T00:00:01Z"));
    assert!(at(&ends, 999_999) && !at(&ends, 1_000_000));
    assert!(at(&policy(Value::Null), u64::MAX));
    assert_eq!(policy(Value::Null).pin.unwrap().ends(), "until its policy is changed");
}

#[test]
fn what_the_job_cannot_run_is_named_with_what_it_offers() {
    let mut s = Snapshot::new(JobId::new("j").unwrap(), 4, 1000);
    s.offer.collectives = vec![Collective::DenseTree, Collective::Allgather];
    let why = |s: &Snapshot, plan: &str| s.cannot_run(&plan.parse().unwrap());
    let sparse = "topk(k=0.7)+ef(vanilla)/allgather";
    assert_eq!(why(&s, sparse), None, "at any ratio");
    assert_eq!(why(&s, "none/dense-tree"), None);
    s.policy.kinds = Some(["none".parse().unwrap()].into());
    assert_eq!(why(&s, sparse), None, "whatever the policy allows");
    for (plan, expected) in [
        ("none/dense-ring", "do not run dense-ring; they run dense-tree, allgather"),
        ("topk(k=0.7)/allgather", "no trainer of the job offers topk(k=*); they offer topk(k=*)+ef(vanilla)"),
        ("fp16/dense-tree", "no trainer of the job offers fp16"),
        ("none/dense-tree | topk(k=0.7)+ef(vanilla)/allgather", "the buckets of the job's gradient are not known"),
    ] {
        let why = why(&s, plan).unwrap();
        assert!(why.contains(expected), "{plan}: {why}");
    }
    s.buckets = vec![1000];
    let two = why(&s, "none/dense-tree | topk(k=0.7)+ef(vanilla)/allgather").unwrap();
    assert!(two.contains("it is of 2 buckets, and the job's gradient has 1"), "{two}");
    s.ranks = 1;
    assert!(why(&s, sparse).unwrap().contains("a single rank"));
    s.offer.collectives = vec![Collective::Allgather];
    assert_eq!(why(&s, "none/dense-ring"), None, "every job can run the ring");
}

#[test]
fn a_pin_that_has_ended_is_none() {
    let policy = JobPolicy::read(
        &json!({ "least_gain": 0.1, "pin": { "strategy": "none/dense-ring", "until": "1970-01-01T00:00:05Z" } }),
    );
    let (policy, end) = (policy.unwrap(), Timestamp(5_000_000));
    assert_eq!(policy.clone().at(Timestamp(end.0 - 1)), policy);
    assert_eq!(policy.at(end), JobPolicy { least_gain: Some(0.1), ..JobPolicy::default() });
}
