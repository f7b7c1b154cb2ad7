set -uo pipefail
made=$(kubectl create -o name -f - <<'END OF MANIFEST'
@MANIFEST@
END OF MANIFEST
)
job=$(grep -i '^rayjob' <<<"$made") || exit 1 # the ConfigMap may be there, of an earlier job with the same recipe
echo "$made"
failures=0 seen=""
while :; do # the RayJob has deadlines of its own
    if state=$(kubectl get@NAMESPACE@ "$job" -o jsonpath='{.status.jobDeploymentStatus} {.status.jobStatus} {.status.reason} {.status.message}'); then
        failures=0
    elif ((++failures == 30)); then
        echo "$job: kubectl has not answered 30 times in a row; the job may still run" >&2
        exit 1
    else
        state=$seen
    fi
    [[ $state == "$seen" ]] || echo "$job: $state"
    seen=$state
    case $state in
    "Complete SUCCEEDED"*) exit 0 ;;
    Complete* | Failed* | ValidationFailed*) exit 1 ;;
    esac
    sleep "${POLL_SECONDS:-10}"
done
