"""Publish on the Hub by a pull request: the model in a folder, or the code of a repository in the published layout.

    python hub_upload/push.py FOLDER org/name
    python hub_upload/push.py FOLDER org/name --push
    python hub_upload/push.py --drop-in org/name --push

Without --push nothing is sent: the command prints each file with its size and its hash, and the text of the pull request.
"""

from neobert_hf.hub.push import main

if __name__ == "__main__":
    main()
