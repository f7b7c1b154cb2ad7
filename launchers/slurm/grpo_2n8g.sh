#!/bin/bash
# recipes/grpo-llama3.1-8B-2n8g.yaml on Slurm, from a checkout.
#
# Usage: sbatch FILE, from a shell in which `grpo-mcore` is in PATH, or with a container (pyxis):
#   CONTAINER=image.sqsh MOUNTS="$PWD:$PWD" COMMAND="grpo-mcore train ... --resume=auto" sbatch FILE
# Options on sbatch's own command line override those below.
#SBATCH --job-name=grpo-llama3-1-8b-2n8g
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=960G
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
#SBATCH --export=PATH,HOME,USER,LOGNAME,SHELL,LANG,TZ,VIRTUAL_ENV,PYTHONPATH,OMP_NUM_THREADS,CONTAINER,MOUNTS,COMMAND,RESTARTS,LOGS,PYTHON,START_TIMEOUT,STAGE_TO,RAY_PORT,HEAD_IP,OBJECT_STORE_GB,GRPO_MCORE_ROOT,HF_HOME,HF_HUB_CACHE,HUGGINGFACE_HUB_CACHE,HF_DATASETS_CACHE,HF_ASSETS_CACHE,HF_XET_CACHE,TRANSFORMERS_CACHE,HF_ENDPOINT,HF_HUB_OFFLINE,HF_DATASETS_OFFLINE,TRANSFORMERS_OFFLINE,HF_HUB_DOWNLOAD_TIMEOUT,HF_HUB_ETAG_TIMEOUT,HF_HUB_DISABLE_XET,HF_HUB_ENABLE_HF_TRANSFER,HTTP_PROXY,HTTPS_PROXY,ALL_PROXY,NO_PROXY,http_proxy,https_proxy,all_proxy,no_proxy,REQUESTS_CA_BUNDLE,CURL_CA_BUNDLE,SSL_CERT_FILE,SSL_CERT_DIR,XDG_CACHE_HOME,LD_LIBRARY_PATH,CUDA_HOME,HF_TOKEN,WANDB_API_KEY

[[ -n ${COMMAND:-} ]] || COMMAND='grpo-mcore train recipes/grpo-llama3.1-8B-2n8g.yaml --resume=auto'
[[ -n ${START_TIMEOUT:-} ]] || START_TIMEOUT=1800 # the recipe's cluster.start_timeout_s

# Slurm runs a copy of this file. The checkout is GRPO_MCORE_ROOT, where the file lies, or where it was submitted.
file=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=//p')
for root in "${GRPO_MCORE_ROOT:-}" "$(dirname "$file")/../.." "${SLURM_SUBMIT_DIR:-}"; do
    body=$root/grpo_mcore/tools/launch/slurm_body.sh
    [[ ! -r $body ]] || break
done
if [[ ! -r $body ]]; then
    echo "grpo_2n8g.sh: no checkout of grpo-mcore: submit from one, or export GRPO_MCORE_ROOT=FOLDER_OF_THE_CHECKOUT" >&2
    exit 2
fi
source "$body"
